//! A host made of files, and properties of all checks.

use std::fs;

use super::*;

/// A host whose `/proc`, `/sys` and `/dev` are files in a temporary directory.
pub(super) struct FakeHost {
    directory: tempfile::TempDir,
}

impl FakeHost {
    pub(super) fn new() -> Self {
        Self {
            directory: tempfile::tempdir().expect("a temporary directory"),
        }
    }

    /// Adds a file with this text.
    pub(super) fn file(self, path: &str, text: &str) -> Self {
        let path = self.host().path(path);
        let parent = path.parent().expect("a path in a directory");
        fs::create_dir_all(parent).expect("the directory");
        fs::write(&path, text).expect("the file");
        self
    }

    /// Returns the host, which is valid while this value lives.
    pub(super) fn host(&self) -> Host {
        Host::at(self.directory.path())
    }
}

#[test]
fn every_check_answers_on_an_empty_host_and_on_this_one() {
    for host in [FakeHost::new().host(), Host::this()] {
        let findings = examine(&host);
        assert_eq!(findings.len(), 16);
        for finding in findings {
            assert!(!finding.detail.is_empty(), "{finding:?}");
            assert!(!finding.detail.contains('\n'), "{finding:?}");
            if finding.status == Status::Ok {
                assert_eq!(finding.remedy, None, "{finding:?}");
            }
        }
    }
}

#[test]
fn a_host_without_anything_is_not_ready() {
    assert!(!is_ready(&examine(&FakeHost::new().host())));
}
