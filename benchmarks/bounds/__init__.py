"""What committed runs must hold, operation by operation; `benchmarks.check` judges them."""
