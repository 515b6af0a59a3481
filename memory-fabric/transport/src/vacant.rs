//! The placeholder for a donor that does not exist.

use super::{Completion, Full, Interest, PageTransport, Ticket};
use fabric_pages::page::PageBytes;

/// Accepts no request.
#[derive(Clone, Copy, Debug)]
pub struct Vacant;

impl PageTransport for Vacant {
    fn post_read(&mut self, _: Ticket, _: u64) -> Result<(), Full> {
        Err(Full)
    }

    fn post_read_run(&mut self, _: Ticket, _: u64, _: u32) -> Result<(), Full> {
        Err(Full)
    }

    fn post_write(&mut self, _: Ticket, _: u64, _: &PageBytes) -> Result<(), Full> {
        Err(Full)
    }

    fn post_drop(&mut self, _: u64, _: u32) -> Result<(), Full> {
        Err(Full)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, _: &mut dyn FnMut(Completion<'_>)) {}

    fn in_flight(&self) -> usize {
        0
    }

    fn is_vacant(&self) -> bool {
        true
    }

    fn interests(&self, _: &mut dyn FnMut(Interest)) {}
}
