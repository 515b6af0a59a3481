#![no_main]

use ssi_hv::cluster::fuzzing::body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body("cluster_file")(data));
