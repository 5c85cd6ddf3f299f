"""What people say about batch size, averaging and learning rate, checked by running it."""
