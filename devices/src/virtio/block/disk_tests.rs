//! Tests of which files can be a disk.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, FileType, MemfdFlags, Mode};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::*;

fn image(bytes: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

fn refused(path: &Path, read_only: bool) -> String {
    let error = Disk::open(path, read_only).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&path.display().to_string()), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn what_is_no_disk_is_refused_with_its_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let absent = directory.path().join("absent");
    assert!(refused(&absent, true).contains("exists"));
    assert!(refused(&absent, false).contains("for writing"));
    for read_only in [true, false] {
        assert!(refused(directory.path(), read_only).contains("is a directory"));
        assert!(refused(Path::new("/dev/null"), read_only).contains("neither a file"));
    }
    assert!(refused(image(0).path(), false).contains("is empty; give it a size"));
    let text = refused(image(1025).path(), false);
    assert!(text.contains("1025 bytes") && text.contains("truncate -s %512"));
    let mut qcow = image(4096);
    qcow.write_all(&QCOW_MAGIC).unwrap();
    let disk = Disk::open(qcow.path(), true).unwrap();
    let text = disk.check_is_raw().unwrap_err().to_string();
    assert!(text.contains("add `,raw`"), "{text}");
    let raw = image(4096);
    Disk::open(raw.path(), true)
        .unwrap()
        .check_is_raw()
        .unwrap();
}

#[test]
fn a_pipe_is_refused_and_not_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    let mode = Mode::RUSR | Mode::WUSR;
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, mode, 0).unwrap();
    for read_only in [true, false] {
        assert!(refused(&pipe, read_only).contains("neither a file"));
    }
}

#[test]
fn one_writes_or_many_read() {
    let file = image(4096);
    let writer = Disk::open(file.path(), false).unwrap();
    assert!(refused(file.path(), false).contains("is in use: by another VM"));
    assert!(refused(file.path(), true).contains("by a VM that writes to it"));
    // By another path as well.
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(file.path(), &link).unwrap();
    refused(&link, false);
    drop(writer);
    let readers = [true, true].map(|read_only| Disk::open(file.path(), read_only).unwrap());
    refused(file.path(), false);
    drop(readers);
    Disk::open(file.path(), false).unwrap();
}

#[test]
fn a_file_that_lost_its_end_is_noticed() {
    let file = image(8192);
    let disk = Disk::open(file.path(), false).unwrap();
    disk.check_size().unwrap();
    file.as_file().set_len(8191).unwrap();
    let text = disk.check_size().unwrap_err().to_string();
    assert!(text.contains("from 8192 to 8191"), "{text}");
    file.as_file().set_len(16384).unwrap();
    disk.check_size().unwrap();
}

#[test]
fn what_is_discarded_takes_no_room_and_what_is_made_zero_is_zero() {
    const BYTES: u64 = 1 << 20;
    let file = image(BYTES);
    let disk = Disk::open(file.path(), false).unwrap();
    let ones = vec![1; usize::try_from(BYTES).unwrap()];
    let blocks = || file.as_file().metadata().unwrap().blocks();
    for unmap in [true, false] {
        disk.write(&ones, 0).unwrap();
        disk.flush().unwrap();
        // A range that is not whole pages.
        disk.write_zeroes(512, BYTES - 1024, unmap).unwrap();
        let mut all = ones.clone();
        disk.read(&mut all, 0).unwrap();
        let zeroes = all.iter().filter(|byte| **byte == 0).count();
        assert_eq!(zeroes, ones.len() - 1024);
        assert_eq!((all[511], all[512]), (1, 0));
    }
    disk.write(&ones, 0).unwrap();
    disk.flush().unwrap();
    let before = blocks();
    disk.discard(0, BYTES / 2).unwrap();
    assert!(blocks() <= before / 2 + 8, "{} of {before}", blocks());
}

#[test]
fn zeroes_are_written_where_the_file_system_has_no_call_for_it() {
    let file = File::from(rustix::fs::memfd_create("disk", MemfdFlags::CLOEXEC).unwrap());
    let bytes = u64::try_from(3 * ZEROES.len()).unwrap();
    let disk = Disk::of(file, bytes);
    disk.write(&vec![1; 3 * ZEROES.len()], 0).unwrap();
    // Memory files do not support it, which this test needs.
    assert!(!disk.fallocate(FallocateFlags::ZERO_RANGE, 0, 512).unwrap());
    disk.write_zeroes(512, bytes - 512, false).unwrap();
    let mut all = vec![2; 3 * ZEROES.len()];
    disk.read(&mut all, 0).unwrap();
    assert!(all[..512].iter().all(|byte| *byte == 1));
    assert!(all[512..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_range_that_the_host_refuses_is_made_zero_by_writing_and_its_discard_is_a_hint() {
    let file = image(8192);
    let disk = Disk::open(file.path(), false).unwrap();
    let zero_range = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    // An empty range is invalid for each file, as a partial range is for devices with long sectors.
    assert!(!disk.fallocate(zero_range, 0, 0).unwrap());
    disk.discard(512, 0).unwrap();
    disk.write_zeroes(512, 0, true).unwrap();
    // An error that does not concern the range stays an error.
    let reader = Disk::open(image(8192).path(), true).unwrap();
    let error = reader.fallocate(zero_range, 0, 512).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBADF));
}

/// A block device with sectors of 4096 bytes, removed on drop.
struct Loop(PathBuf);

impl Loop {
    fn of(file: &Path) -> Option<Self> {
        let arguments = ["--find", "--show", "--sector-size", "4096"];
        match Command::new("losetup").args(arguments).arg(file).output() {
            Ok(made) if made.status.success() => {
                let name = String::from_utf8(made.stdout).unwrap();
                Some(Self(name.trim().into()))
            }
            _ => {
                println!("SKIPPED: a loop device cannot be created here");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("-d").arg(&self.0).status();
        assert!(detached.is_ok_and(|status| status.success()) || thread::panicking());
    }
}

#[test]
fn a_device_of_long_sectors_takes_all_requests_for_short_ones() {
    const BYTES: usize = 1 << 20;
    let file = image(1 << 20);
    let Some(device) = Loop::of(file.path()) else {
        return;
    };
    let disk = Disk::open(&device.0, false).unwrap();
    assert_eq!(disk.bytes(), 1 << 20);
    let mut model = vec![1; BYTES];
    disk.write(&model, 0).unwrap();
    let mut check = |at: usize, count: usize, byte: u8| {
        model[at..at + count].fill(byte);
        let mut all = vec![9; BYTES];
        disk.read(&mut all, 0).unwrap();
        assert!(all == model, "{count} bytes at {at}");
        let mut part = vec![9; count];
        disk.read(&mut part, at as u64).unwrap();
        assert!(part.iter().all(|found| *found == byte));
    };
    disk.write(&[2; 512], 1536).unwrap();
    check(1536, 512, 2);
    for (at, count, unmap) in [
        (512, 512, true),
        (4608, 512, false),
        (8192, 4608, true),
        (20_992, 200_192, false),
        (262_144, 65_536, true),
    ] {
        disk.write_zeroes(at as u64, count as u64, unmap).unwrap();
        check(at, count, 0);
    }
    disk.discard(512, 512).unwrap();
    disk.discard(512 << 10, 100 << 10).unwrap();
    disk.flush().unwrap();
}

#[test]
fn a_disk_is_at_work_while_the_host_is() {
    let file = image(4096);
    let disk = Disk::open(file.path(), false).unwrap();
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
    let page = memory.get_host_address(GuestAddress(0)).unwrap();
    let uffd = userfaultfd::UffdBuilder::new()
        .close_on_exec(true)
        .user_mode_only(false)
        .create();
    let uffd = match uffd {
        Ok(uffd) => uffd,
        Err(error) => {
            println!("SKIPPED: no userfaultfd for kernel faults: {error}");
            return;
        }
    };
    uffd.register(page.cast(), 4096).unwrap();
    // SAFETY: the page is mapped while `memory` lives, and nothing else uses it.
    let buffer = unsafe { std::slice::from_raw_parts_mut(page, 4096) };
    assert!(!disk.is_at_work());
    thread::scope(|scope| {
        // The host's call waits for the page into which it must read.
        let reading = scope.spawn(|| disk.read(buffer, 0));
        let event = uffd.read_event().unwrap().unwrap();
        assert!(matches!(event, userfaultfd::Event::Pagefault { .. }));
        let was_at_work = disk.is_at_work();
        // SAFETY: the page is registered, and part of `memory`.
        unsafe { uffd.zeropage(page.cast(), 4096, true) }.unwrap();
        reading.join().unwrap().unwrap();
        assert!(was_at_work);
    });
    assert!(!disk.is_at_work());
}

#[test]
fn once_a_flush_has_failed_none_succeeds() {
    let file = image(4096);
    let disk = Disk::open(file.path(), false).unwrap();
    disk.flush().unwrap();
    let failed = || Err(io::Error::from_raw_os_error(libc::ENOSPC));
    disk.flush_by(|_| failed()).unwrap_err();
    for _ in 0..2 {
        let error = disk.flush().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    }
    // Opened again, by another run, it has what the host has stored.
    drop(disk);
    Disk::open(file.path(), false).unwrap().flush().unwrap();
}

#[test]
fn a_flush_beside_one_that_fails_does_not_succeed() {
    let file = image(4096);
    let disk = &Disk::open(file.path(), false).unwrap();
    let (started, has_started) = channel();
    let (ended, result) = channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            has_started.recv().unwrap();
            ended.send(disk.flush()).unwrap();
        });
        let first = disk.flush_by(|_| {
            started.send(()).unwrap();
            // One that does not wait ends meanwhile.
            let other = result.recv_timeout(Duration::from_millis(200));
            assert!(other.is_err(), "{other:?}");
            Err(io::Error::from_raw_os_error(libc::EIO))
        });
        first.unwrap_err();
        result.recv().unwrap().unwrap_err();
    });
}
