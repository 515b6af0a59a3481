//! `ssi-hv node` as a user meets it, where it cannot start.

use std::process::{Command, Stdio};

use ssi_hv::exit::ExitCode;

#[test]
fn a_device_that_is_not_there_is_answered_with_the_flag_of_the_node() {
    let listen = ["node", "--listen", "127.0.0.1:0", "--memory", "1M"];
    let output = Command::new(env!("CARGO_BIN_EXE_ssi-hv"))
        .args(listen)
        .args(["--rdma-device", "no-such-device"])
        .stdin(Stdio::null())
        .output()
        .expect("the command starts");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    let code = i32::from(ExitCode::HostError.code());
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    // With a library, without one, and with other devices.
    assert!(stderr.contains("--rdma-device none"), "{stderr}");
    assert!(!stderr.contains("--transport"), "{stderr}");
}
