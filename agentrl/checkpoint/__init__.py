"""Checkpoints: tensors of every rank, manifests, copies in object stores, and resuming."""
