"""Every kind of model, ready to search, to train and to lay out by hand, at three scales."""
