"""What make_coco320 needs: download (the files and the json of a COCO download), labels (an annotation to a row)."""
