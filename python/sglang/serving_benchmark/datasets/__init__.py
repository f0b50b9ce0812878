"""What is asked of a server: one module per kind of source, and `registry`, which names them."""
