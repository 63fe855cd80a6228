"""The matrix cores that conv2d and bmm share."""
