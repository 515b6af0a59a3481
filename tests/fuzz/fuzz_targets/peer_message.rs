#![no_main]

use fabric_peers::fuzzing::body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body("peer_message")(data));
