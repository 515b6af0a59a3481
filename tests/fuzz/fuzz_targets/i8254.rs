#![no_main]

use devices::fuzzing::{TARGETS, body};

libfuzzer_sys::fuzz_target!(|data: &[u8]| body(TARGETS, "i8254")(data));
