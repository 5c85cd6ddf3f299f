"""What is compared: model, loss, batch, shards and layout, and how each process rebuilds them."""
