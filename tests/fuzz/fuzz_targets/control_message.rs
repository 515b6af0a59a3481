#![no_main]

use fabric_wire::fuzzing::body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body("control_message")(data));
