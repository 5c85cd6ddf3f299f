"""What a rank does with a case, what is watched while it does, and how its gradients come back."""
