"""Small faulty steps without a known cause: the report says where each of them goes astray."""
