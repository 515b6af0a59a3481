//! Tests of writing a report to its file.

use std::fs;
use std::io;
use std::path::Path;

use super::*;
use crate::report::{Host, Report};

fn files_in(directory: &Path) -> Vec<String> {
    fs::read_dir(directory)
        .expect("the directory")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect()
}

#[test]
fn preparing_leaves_nothing_behind_and_writing_leaves_the_report_alone() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("report.json");
    let file = ReportFile::prepare(&path).expect("is writable");
    assert!(files_in(directory.path()).is_empty());
    for evictions in [1, 2] {
        let report = Report {
            evictions,
            ..Report::new(Host::default())
        };
        file.write(&report).expect("is written");
        let text = fs::read_to_string(&path).expect("the report");
        assert_eq!(
            serde_json::from_str::<Report>(&text).expect("is a report"),
            report
        );
        assert_eq!(files_in(directory.path()), ["report.json"]);
    }
}

#[test]
fn what_a_process_of_this_number_left_is_in_nobodys_way() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("report.json");
    let left = format!(".report.json.{}.tmp", std::process::id());
    let left = directory.path().join(left);
    fs::write(&left, "half").expect("is written");
    let file = ReportFile::prepare(&path).expect("is writable");
    fs::write(&left, "half").expect("is written");
    file.write(&Report::default()).expect("is written");
    assert_eq!(files_in(directory.path()), ["report.json"]);
}

#[test]
fn a_place_that_cannot_be_written_is_found_before_the_work() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    for path in [
        directory.path().join("none/report.json"),
        directory.path().into(),
    ] {
        let message = ReportFile::prepare(&path)
            .expect_err("is not writable")
            .to_string();
        assert!(message.contains(&path.display().to_string()), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn a_full_disk_is_an_error_and_not_a_panic() {
    let file = ReportFile::prepare(Path::new("/dev/full")).expect("a device is written to");
    let error = file
        .write(&Report::default())
        .expect_err("the disk is full");
    let ReportError::Write { source, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!(source.kind(), io::ErrorKind::StorageFull);
}

#[test]
fn a_failed_write_keeps_the_older_report_and_no_temporary_file() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("report.json");
    fs::write(&path, "older").expect("is written");
    let file = ReportFile::prepare(&path).expect("is writable");
    let gone = directory.path().join("gone");
    fs::rename(directory.path().join("report.json"), &gone).expect("is renamed");
    fs::create_dir(&path).expect("is created");
    assert!(file.write(&Report::default()).is_err());
    assert_eq!(fs::read_to_string(gone).expect("the older"), "older");
    assert_eq!(files_in(directory.path()).len(), 2);
}

#[test]
fn a_symbolic_link_stays_one() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let real = directory.path().join("real.json");
    let link = directory.path().join("link.json");
    fs::write(&real, "").expect("is written");
    std::os::unix::fs::symlink(&real, &link).expect("is linked");
    let file = ReportFile::prepare(&link).expect("is writable");
    file.write(&Report::default()).expect("is written");
    assert!(link.is_symlink());
    assert!(fs::metadata(&real).expect("the report").len() > 0);
}

#[test]
fn the_place_of_a_link_is_what_it_is_to() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (link, target) = ["link.json", "there/report.json"]
        .map(|name| directory.path().join(name))
        .into();
    fs::create_dir(directory.path().join("there")).expect("created");
    std::os::unix::fs::symlink(&target, &link).expect("created");
    // One that would be created is where it is named.
    assert_eq!(ReportFile::place(&link), link);
    fs::write(&target, "old").expect("written");
    let file = ReportFile::prepare(&link).expect("is writable");
    let place = ReportFile::place(&link);
    assert_eq!(place, fs::canonicalize(&target).expect("it exists"));
    file.write(&Report::default()).expect("is written");
    assert!(fs::symlink_metadata(&link).expect("is there").is_symlink());
    assert_eq!(files_in(&directory.path().join("there")), ["report.json"]);
    assert_eq!(
        ReportFile::place(Path::new("/dev/null")),
        Path::new("/dev/null")
    );
}
