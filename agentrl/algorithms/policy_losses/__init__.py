"""The built-in policy losses, one a file."""
