"""Cases on which a strategy promises the gradients of one big batch, and right code of users."""
