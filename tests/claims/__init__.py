"""What people say about batch size, averaging and learning rate, settled by running it."""
