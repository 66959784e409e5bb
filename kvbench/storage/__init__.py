"""The formats in which rows are kept and attended while decoding."""
