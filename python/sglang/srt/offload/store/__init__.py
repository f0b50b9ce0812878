"""The remote tier's store: a client of the Redis protocol, and blocks as objects in it. Loads no torch."""
