"""Search for step tables of a frozen model by least squares and gradients; needs torch."""
