"""Harnesses of coding programs that are published, one file each: settings, start, and the version that was tried."""
