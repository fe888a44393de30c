"""What one sample can do: clipped sums of per-sample gradients, and models that allow them."""
