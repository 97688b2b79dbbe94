"""One file per format, writer and reader together. Repack only: no exporter rounds a weight."""
