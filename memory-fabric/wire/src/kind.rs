//! What frames there are, and how long they may be.

use crate::packing::{LENGTH_BYTES, Packing, packed_bytes_max};
use crate::{CONTROL_BYTES_MAX, COUNT_BYTES, PAYLOAD_BYTES_MAX, PROBE_BYTES_MAX, RUN_PAGES_MAX};
use fabric_pages::page::PAGE_SIZE;

/// What a frame is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum FrameKind {
    /// [`LeaseRequest`]: lend me memory.
    Lease = 1,
    /// [`LeaseGrant`]: the answer to `Lease`.
    Granted = 2,
    /// [`Token`]: go on with a lease on a new control connection.
    Resume = 3,
    /// [`Token`]: keep a lease.
    Renew = 4,
    /// [`LeaseStatus`]: the answer to `Resume`, `Renew` and `Release`.
    Status = 5,
    /// [`Token`]: end a lease.
    Release = 6,
    /// [`AttachRequest`]: use this connection for pages of a lease.
    Attach = 7,
    /// No payload: the answer to `Attach`.
    Attached = 8,
    /// A message of the RDMA transport: let me read pages of a lease by RDMA.
    Connect = 9,
    /// A message of the RDMA transport: the answer to `Connect`.
    Connected = 10,
    /// No payload: send the page at `offset` (bytes into the lease).
    ReadPage = 16,
    /// One page: the answer to `ReadPage`.
    PageData = 17,
    /// One page: store it at `offset`.
    WritePage = 18,
    /// No payload: the answer to `WritePage`.
    Written = 19,
    /// A number of pages, 4 bytes, from 1 to [`DROP_PAGES_MAX`]: forget those from `offset` on.
    /// The VM does not read them before it has written them again.
    DropPages = 20,
    /// No payload: the answer to `DropPages`.
    Dropped = 21,
    /// A number of pages, 4 bytes, from 1 to [`RUN_PAGES_MAX`]: send so many from `offset` on.
    ReadPages = 22,
    /// The pages one after the other: the answer to `ReadPages`.
    PagesData = 23,
    /// A number of bytes, 4 bytes, from 1 to [`PROBE_BYTES_MAX`]: send so many from `offset` on.
    /// Only on connections of [`TrafficClass::Probe`].
    Probe = 24,
    /// The bytes: the answer to `Probe`.
    ProbeData = 25,
    /// No payload: end the RDMA connection for write-backs, if there is one. What comes behind
    /// this on its connection is carried out when no WRITE can change the lease any more.
    Fence = 26,
    /// No payload: the answer to `Fence`.
    Fenced = 27,
    /// [`ErrorMessage`]: the request was refused; the connection ends.
    Error = 31,
}

impl FrameKind {
    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        use FrameKind::*;
        let all = [
            Lease, Granted, Resume, Renew, Status, Release, Attach, Attached, Connect, Connected,
            ReadPage, PageData, WritePage, Written, DropPages, Dropped, ReadPages, PagesData,
            Probe, ProbeData, Fence, Fenced, Error,
        ];
        all.into_iter().find(|&kind| kind as u8 == byte)
    }

    /// Whether frames of this kind say how pages are packed, or may be.
    pub(crate) const fn has_packing(self) -> bool {
        matches!(
            self,
            Self::ReadPage | Self::ReadPages | Self::PageData | Self::PagesData | Self::WritePage
        )
    }

    /// Payload lengths that this kind may have, bytes, with its pages packed or not.
    #[must_use]
    pub const fn payload_bytes(self, packing: Packing) -> (usize, usize) {
        match (self, packing) {
            (Self::PageData | Self::WritePage, Packing::Zeroes | Packing::Lz4) => {
                return (LENGTH_BYTES, packed_bytes_max(1));
            }
            (Self::PagesData, Packing::Zeroes | Packing::Lz4) => {
                return (LENGTH_BYTES, packed_bytes_max(RUN_PAGES_MAX as usize));
            }
            _ => {}
        }
        match self {
            Self::PageData | Self::WritePage => (PAGE_SIZE, PAGE_SIZE),
            Self::Attached
            | Self::ReadPage
            | Self::Written
            | Self::Dropped
            | Self::Fence
            | Self::Fenced => (0, 0),
            Self::DropPages | Self::ReadPages | Self::Probe => (COUNT_BYTES, COUNT_BYTES),
            Self::ProbeData => (1, PROBE_BYTES_MAX as usize),
            Self::PagesData => (PAGE_SIZE, PAYLOAD_BYTES_MAX),
            _ => (0, CONTROL_BYTES_MAX),
        }
    }
}
