"""Being here, this puts its folder on the import path: tests below may import `server_fixture`."""
