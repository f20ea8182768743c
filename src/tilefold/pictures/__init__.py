"""What masks and explanations look like: what draws is apart from what computes."""
