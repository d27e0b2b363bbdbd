"""What the discriminator minimises: pure functions of scores. Tensors go in and a scalar in nats comes out."""
