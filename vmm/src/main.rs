//! The `ssi-hv` command.
fn main() {}
