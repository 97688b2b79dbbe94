"""Files in, files out: readers, the atomic resumable writer, and the scan of hostile files."""
