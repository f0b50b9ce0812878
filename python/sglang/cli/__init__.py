"""`python -m sglang.cli`: commands for people who run servers."""
