"""Models on disk. This package imports none of its modules, so `checkpoint.manifest` can be imported without torch."""
