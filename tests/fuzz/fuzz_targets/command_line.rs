#![no_main]

use devices::fuzzing::body;
use ssi_hv_machine::fuzzing::TARGETS;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body(TARGETS, "command_line")(data));
