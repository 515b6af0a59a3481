//! Unusable devices of the host, which are reported before anything starts.

use std::fs;
use std::time::{Duration, Instant};

use ::devices::virtio::Disk;
use ssi_hv::exit::ExitCode;

use super::{KERNEL, refused};

#[test]
fn a_disk_that_cannot_be_one_is_refused_before_anything_starts() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let image = directory.path().join("disk.img");
    fs::write(&image, [0; 4096]).expect("the image is written");
    let path = image.to_str().expect("UTF-8");
    let run = |disk: &str| {
        refused(
            &["run", "--kernel", KERNEL, "--disk", disk],
            ExitCode::Usage,
        )
    };
    let used = Disk::open(&image, false).expect("it can be opened");
    let line = run(path);
    assert!(line.contains("is in use: by another VM"), "{line}");
    drop(used);
    // The lock outlives its file while a child that another test starts still has a copy of the
    // descriptor, until its exec.
    let deadline = Instant::now() + Duration::from_secs(10);
    let shared = loop {
        match Disk::open(&image, true) {
            Ok(shared) => break shared,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::yield_now();
    };
    let line = run(&format!("path={path}"));
    assert!(
        line.contains("to all of its users with ,readonly"),
        "{line}"
    );
    drop(shared);
    fs::write(&image, [0; 1000]).expect("the image is written");
    let line = run(path);
    assert!(
        line.contains("1000 bytes") && line.contains("sector size, 512"),
        "{line}"
    );
    let line = run("/no/such.img,readonly");
    assert!(
        line.contains("cannot open the disk /no/such.img; name"),
        "{line}"
    );
    assert!(
        line.ends_with("No such file or directory (os error 2)"),
        "{line}"
    );
    assert!(run("/").contains("the disk / is a directory"));
    let many = [
        &["run", "--kernel", KERNEL][..],
        &["--disk", path].repeat(7),
    ]
    .concat();
    let line = refused(&many, ExitCode::Usage);
    let given = "7 disk(s), 0 network card(s) and 2 other(s) given, 8 in all is the limit";
    assert!(line.contains(given), "{line}");
}

#[test]
fn two_disks_of_one_image_are_refused_unless_both_are_read_only() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let image = directory.path().join("disk.img");
    fs::write(&image, [0; 4096]).expect("the image is written");
    let path = image.to_str().expect("UTF-8");
    let read_only = format!("{path},readonly");
    for second in [path, &read_only] {
        let arguments = ["run", "--kernel", KERNEL, "--disk", path, "--disk", second];
        let line = refused(&arguments, ExitCode::Usage);
        assert!(line.contains("is in use"), "{line}");
    }
    // The file is not a kernel, which ends the run early.
    let disks = ["--disk", &read_only, "--disk", &read_only];
    let arguments = [&["run", "-q", "--kernel", KERNEL][..], &disks].concat();
    let line = refused(&arguments, ExitCode::HostError);
    assert!(line.contains("kernel") && !line.contains("disk"), "{line}");
}

#[test]
fn a_vsock_that_cannot_be_made_is_refused_and_a_stale_one_replaced() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("v.sock");
    let vsock = format!("cid=3,path={}", path.display());
    let run = |vsock: &str| {
        refused(
            &["run", "--kernel", KERNEL, "--vsock", vsock],
            ExitCode::Usage,
        )
    };
    let other = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
    assert!(run(&vsock).contains("is in use, possibly by another VM"));
    drop(other);
    let arguments = ["run", "-q", "--kernel", KERNEL, "--vsock", &vsock];
    let line = refused(&arguments, ExitCode::HostError);
    assert!(line.contains("kernel"), "{line}");
    assert!(!path.exists(), "it goes with the run");
    assert!(run("cid=3,path=/no/such/v.sock").contains("cannot create the vsock /no/such/v.sock"));
    assert!(run("cid=1,path=v.sock").contains("no cid= from 3 to"));
}

#[test]
fn a_tap_that_cannot_be_used_is_refused_before_anything_starts() {
    let run = |net: &str| refused(&["run", "--kernel", KERNEL, "--net", net], ExitCode::Usage);
    let line = run("tap=no-such-tap0");
    assert!(
        line.contains("the tap no-such-tap0 is not there; make it with"),
        "{line}"
    );
    assert!(run("tap=a/b").contains("`a/b` is not a valid tap name"));
    assert!(run("tap=lo").contains("lo"));
    assert!(run("tap0").contains("names no tap; write tap=NAME"));
}
