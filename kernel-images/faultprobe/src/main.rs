//! faultprobe
fn main() {}
