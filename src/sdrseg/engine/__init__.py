"""The engine runs the steps of a scenario: fit, save, evaluate. A run can be killed at any moment and resumed."""
