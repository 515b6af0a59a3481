#![no_main]

use fabric_transport::fuzzing::body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body("quic_lanes")(data));
