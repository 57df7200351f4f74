"""What users import in their own tests. Nothing in keiro outside this package depends on it."""
