"""Read models: pure folds of events into rows."""
