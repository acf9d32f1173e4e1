"""Models on disk. Its modules are imported by name, so that the one that reads manifests needs no torch."""
