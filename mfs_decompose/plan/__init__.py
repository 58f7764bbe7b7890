"""What will be done, from headers alone: no tensor bytes are read on this floor, and no tensor library is needed."""
