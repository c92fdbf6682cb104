"""From a layout to the program that runs; one search problem for each value of the knobs."""
