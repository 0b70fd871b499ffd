"""What makes products and steps fast: packed products on a CPU, fused norms, compiled functions, CUDA graphs."""
