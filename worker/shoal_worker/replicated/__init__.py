"""Models of which every rank holds the whole: gradients summed over the ranks in each step, or parameters averaged every few steps."""
