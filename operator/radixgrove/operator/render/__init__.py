"""From specs to Kubernetes objects: pure functions, the same input always the same output."""
