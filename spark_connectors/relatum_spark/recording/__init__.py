"""Back-fill and verification, in parallel: the kernel's own, in tasks."""
