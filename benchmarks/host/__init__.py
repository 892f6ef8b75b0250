"""What a call costs before its kernels run."""
