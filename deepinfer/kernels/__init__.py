"""Operations of the model: signatures, the torch reference that is every oracle, and accelerator kernels."""
