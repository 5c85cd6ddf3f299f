"""What runs in the processes of an observed script, from the moment when it has imported torch."""
