#![no_main]

use memory_fabric::fuzzing::body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body("certificate")(data));
