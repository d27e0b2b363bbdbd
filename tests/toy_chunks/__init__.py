"""The toy task, which does many updates between two looks of the loop."""
