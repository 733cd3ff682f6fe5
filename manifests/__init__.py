"""What the user declares: manifests, their schema, and the errors of the whole package."""
