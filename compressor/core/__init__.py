"""The types that travel: Spec, QTensor, RawTensor, Report. No torch, no files."""
